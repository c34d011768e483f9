"""Plugins: the hook specifications, and the registry that finds what is installed."""
