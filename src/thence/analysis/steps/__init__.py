"""The steps of a program: their windows on the devices, their busy and idle time, and kinds of server steps."""
