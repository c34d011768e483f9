"""Traffic as tests compare it, and logs as files."""

from collections import Counter


def file_of(folder, lines, name="a.log", ends="\n"):
    path = folder / name
    path.write_bytes("".join(line + ends for line in lines).encode())
    return str(path)


def shapes(traffic):
    """Return steps by requests, tokens and query length."""
    counts: Counter[tuple[int, int, int | None]] = Counter()
    for batch in traffic.batches:
        counts[batch.num_reqs, batch.num_tokens, batch.query_len] += batch.count
    return counts
