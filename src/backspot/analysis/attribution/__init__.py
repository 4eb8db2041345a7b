"""Whose: the module that owns each autograd node and each piece of device work."""
