"""Graphs: CUDA graphs on a GPU, recorded graphs without one."""
