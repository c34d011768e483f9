"""What the plugins inside engines share: how they get in and say what they do, and how they write what they observed.

Names no engine, and imports neither one nor torch: a plugin hands over the loggers, functions and events.
"""
