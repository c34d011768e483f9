"""One forward of one role: fields, padding, guards, capture and replay."""
