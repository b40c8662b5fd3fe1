"""The steps of a program: their windows on the devices, what is in them, and the kinds of an inference server's."""
