"""Host work of a decode step, outside the model: dispatch, fill, padding, preparation and guards.

Runs the tiny deployment with more requests, and takes the times that the ledger has of each forward.
Three questions: is a step of 64 requests within 150 us on one core; does it grow with the number of
captured entries; how does it grow with requests. And what do the guards cost?
"""

from __future__ import annotations
