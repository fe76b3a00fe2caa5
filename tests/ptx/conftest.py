"""Only who asks for the device gets it: it is no place to look for doctests."""

collect_ignore = ["device.py"]
