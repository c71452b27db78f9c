"""Which backward passes count for which piece, also where a piece has several or nobody asks for it."""

from __future__ import annotations

import torch

from spare_megatron.exact_sum.piece_checksums import PieceChecksums


def test_a_piece_is_what_the_sums_gain_in_its_passes() -> None:
    totals = torch.tensor([[5, 0], [7, 0]])
    pieces = PieceChecksums(totals)
    for piece, gain in ((3, 10), (4, 100), (3, 1)):
        pieces.pass_begins(piece, audited=False, compared=piece == 3)
        assert pieces.report is None
        totals[:, 0] += gain
        pieces.pass_ends()
    totals += 1000
    assert {piece: gain.tolist() for piece, gain in pieces.inside.items()} == {3: [11, 11]}
    assert not pieces.audited


def test_an_audited_piece_reports_apart_and_a_step_forgets() -> None:
    totals = torch.zeros(2, 2, dtype=torch.int64)
    pieces = PieceChecksums(totals)
    for gain in (2, 3):
        pieces.pass_begins(8, audited=True, compared=False)
        assert pieces.report is not None
        pieces.report[0, 0] += gain
        pieces.pass_ends()
    assert pieces.report is None
    assert pieces.audited[8].tolist() == [[5, 0], [0, 0]]
    assert not totals.any()
    pieces.begin_step()
    assert not pieces.audited
