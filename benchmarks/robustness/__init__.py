"""What does it survive: hostile input, large input, interrupts at any moment?"""
