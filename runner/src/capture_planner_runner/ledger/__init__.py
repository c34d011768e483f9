"""The ledger: rows of what happened, exact counts of all of it, and the session that keeps both."""
