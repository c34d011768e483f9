"""What people paste, read: the command that starts an engine's server, in a shell's text, a script or a service's file."""
