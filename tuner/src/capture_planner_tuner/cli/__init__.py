"""Commands that tune, launch and compare deployments."""
