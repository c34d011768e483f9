"""What people and programs are shown: tables, findings, and the data behind both."""
