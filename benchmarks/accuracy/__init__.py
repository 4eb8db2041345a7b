"""Are the modules that it names the right ones, and are its numbers true?"""
