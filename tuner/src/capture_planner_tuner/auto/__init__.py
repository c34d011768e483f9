"""``launch --auto``: what it decides, the folder that it keeps, and the engine that it starts."""
