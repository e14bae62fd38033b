"""Recorded computations: buckets, padding, and what is kept."""

from __future__ import annotations

import pytest
import torch

from workers.engine.graphs import Bucket, Graphs, Key, NoRecorder, bucket_of

CPU = torch.device("cpu")
ONE = Bucket(1, 1, 1024)


@pytest.mark.parametrize(
    ("rows", "query", "longest", "expected"),
    [
        (1, 1, 1, Bucket(1, 1, 1024)),
        (2, 4, 10, Bucket(4, 5, 1024)),
        (17, 9, 1024, Bucket(32, 9, 1024)),
        (17, 8, 1024, Bucket(32, 9, 1536)),
        (17, 9, 1537, Bucket(32, 9, 2048)),
        (1, 1, 2049, Bucket(1, 1, 3008)),
        (65, 1, 3000, Bucket(128, 1, 3008)),
        (1, 20, 20, Bucket(1, 20, 1024)),
    ],
)
def test_a_forward_runs_in_the_smallest_shape_that_holds_it(
    rows: int, query: int, longest: int, expected: Bucket
) -> None:
    assert bucket_of(rows, query, longest, max_query=20, capacity=3008) == expected


class Counting:
    """Says how often something was recorded."""

    def __init__(self) -> None:
        self.graphs = Graphs(NoRecorder(), CPU, most=2)
        self.recorded: list[str] = []

    def doubled(self, key: str, value: float) -> float:
        graph = self.graphs.get(Key(key, ONE), lambda: self.made(key), lambda x: {"y": x * 2})
        return float(graph.run(x=torch.tensor([value]))["y"][0])

    def made(self, key: str) -> dict[str, torch.Tensor]:
        self.recorded.append(key)
        return {"x": torch.zeros(3)}


def test_a_shape_is_recorded_once_and_the_one_not_used_for_longest_makes_room() -> None:
    counting = Counting()

    results = [counting.doubled(key, float(number)) for number, key in enumerate("aabacaba")]

    assert results == [2.0 * number for number in range(8)]
    assert counting.recorded == ["a", "b", "c", "b"]
    assert len(counting.graphs) == 2


def test_what_stands_behind_a_shorter_value_stays() -> None:
    graphs = Graphs(NoRecorder(), CPU)
    graph = graphs.get(Key("sum", ONE), lambda: {"x": torch.zeros(3)}, lambda x: {"y": x.sum(dim=0, keepdim=True)})

    graph.run(x=torch.tensor([1.0, 2.0, 3.0]))

    assert graph.run(x=torch.tensor([5.0]))["y"].tolist() == [10.0]
