"""What people paste: the command of an engine's server in a shell's text, a script, or the file of a service."""
