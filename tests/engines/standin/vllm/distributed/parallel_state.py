"""The group of data-parallel ranks, without other processes."""


class GroupCoordinator:
    """Sums a vector with ``peers``: rank and column; a rank without one brings what the first brings."""

    def __init__(self):
        self.peers, self.sums = {}, []

    def cpu_all_reduce_(self, tensor):
        for rank in range(1, tensor.shape[1]):
            tensor[:, rank] = tensor.new_tensor(self.peers[rank]) if rank in self.peers else tensor[:, 0]
        self.sums.append(tensor.tolist())
        return tensor


_DP = GroupCoordinator()


def get_dp_group():
    """Return the group."""
    return _DP
