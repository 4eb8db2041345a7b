"""Does anything break it: broken input, sizes, scripts that nobody wrote for it?"""
