"""Numbers of layers of the pipeline stages."""

from __future__ import annotations


def layers_of_chunk(
    num_layers: int, stages: int, chunks: int, stage: int, chunk: int, first: int = 0, last: int = 0
) -> range:
    """Return the global indices of the layers of one chunk of a pipeline stage; see `layers_of_stages`."""
    sizes = [size // chunks for size in layers_of_stages(num_layers, stages, chunks, first, last)]
    # Interleave as in megatron-core: the first chunks of all stages, then the second chunks.
    start = chunk * sum(sizes) + sum(sizes[:stage])
    return range(start, start + sizes[stage])


def layers_of_stages(num_layers: int, stages: int, chunks: int, first: int = 0, last: int = 0) -> tuple[int, ...]:
    """Return the number of layers of each of `stages` pipeline stages, a multiple of its `chunks` (virtual stages).

    `first` and `last`: layers of the first and the last stage, 0 for an even share; the others share the rest evenly, as
    megatron-core does. ValueError, naming the sizes, if they do not divide evenly.
    """
    given = (first > 0) + (last > 0)
    if given and stages == 1:
        raise ValueError(f"layers of the first and last stage ({first}, {last}) need several stages; drop them")
    rest, others = num_layers - first - last, stages - given
    if others:
        share, left = divmod(rest, others * chunks)
        share *= chunks
    else:
        share, left = 0, rest
    sizes = (first or share, *(share for _ in range(stages - 2)), *([last or share] if stages > 1 else []))
    if left or min(sizes) < 1 or any(size % chunks for size in sizes):
        ends = (
            f" with {first or 'an even share'} in the first and {last or 'an even share'} in the last" if given else ""
        )
        raise ValueError(
            f"{num_layers} layers do not split over pipeline {stages} x virtual_pipeline {chunks} = {stages * chunks} chunks{ends}; "
            f"choose sizes whose product divides {num_layers}, or other numbers of layers in the first and last stage"
        )
    return sizes
