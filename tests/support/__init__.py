"""What the tests of several folders share: importable as ``support``."""
