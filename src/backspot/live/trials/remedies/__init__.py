"""The remedies that can be tried: what a file tries is in its first line.

A remedy is a function that prepares copies and returns a ``Trial``: the code as it is, and each
other way to write it. Nothing lists the remedies: the first trial imports every file in this
folder.
"""
