"""What SGLang captures and dispatches, from its command line; needs no SGLang."""
