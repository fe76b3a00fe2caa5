"""The words of other programs, a file for each: its keys, read and written.

A setting is right because the program's own reader takes it for the ropes (`by_reading`).
"""
