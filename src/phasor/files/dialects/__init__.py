"""One file for each program: how its settings are read and written.

A setting is right because the program's own reader takes it for the ropes (`by_reading`).
"""
