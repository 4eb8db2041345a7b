"""Causes planted on purpose: are they found, in the right place, and nothing else?"""
