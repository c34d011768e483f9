"""Frozen values that files and calls carry: specs, environments, plans, batches, declarations of backends.

An invalid value cannot be made: constructors raise ``InvalidValue`` with the path of each wrong field. Every record is
imported from the module that defines it.
"""
