"""Compiled bodies: the layers of a model as few kernels, between calls of attention that stay as they are."""
