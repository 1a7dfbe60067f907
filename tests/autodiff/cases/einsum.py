"""Einsum: contractions, sums, diagonals, ellipses."""

from autodiff.case import case, normal

CASES = [
    *[
        case(
            "Einsum",
            *(normal(*shape, seed=seed) for seed, shape in enumerate(shapes)),
            label=f"{equation}{shapes}",
            equation=equation,
        )
        for equation, *shapes in [
            ("ij,jk->ik", (2, 3), (3, 4)),
            ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
            ("bhqd,bhkd->bhqk", (2, 2, 3, 4), (2, 2, 5, 4)),
            (" i j , j k ", (2, 3), (3, 4)),
            ("ba,cb", (2, 3), (4, 2)),
            ("ij->ji", (2, 3)),
            ("ij->", (2, 3)),
            ("ij->i", (2, 3)),
            ("ijk->k", (2, 3, 4)),
            ("ij,kl->ik", (2, 3), (4, 5)),
            ("i,i", (3,), (3,)),
            ("i,j->ij", (2,), (3,)),
            ("i,ij,j->", (2,), (2, 3), (3,)),
            ("ij,ij,ij->ij", (2, 3), (2, 3), (2, 3)),
            ("ij,jk,kl->il", (2, 3), (3, 4), (4, 2)),
            (",ij->ij", (), (2, 3)),
            ("ii->i", (3, 3)),
            ("ii", (3, 3)),
            ("iji->j", (3, 2, 3)),
            ("iii->i", (2, 2, 2)),
            ("iij,jk->ik", (2, 2, 3), (3, 4)),
            ("ii,jj->ij", (2, 2), (3, 3)),
            ("...ij,...jk->...ik", (2, 3, 4), (2, 4, 5)),
            ("...ij,...jk->...ik", (2, 1, 3, 4), (1, 3, 4, 5)),
            ("...ij,jk->...ik", (2, 2, 3, 4), (4, 5)),
            ("ij,...jk->...ik", (2, 3), (4, 3, 5)),
            ("b...i->b...", (2, 3, 4)),
            ("...i", (2, 3, 4)),
            ("i...,i->...", (2, 3, 4), (2,)),
            ("ij,jk->ik", (0, 3), (3, 4)),
        ]
    ],
    # A diagonal beside an ellipsis needs to know the rank.
    case("Einsum", normal(2, 3, 3), label="...ii->...i", equation="...ii->...i", shapes=("static", "dynamic")),
    # ONNX Runtime does not take ellipses of different ranks, though our gradient has none.
    case(
        "Einsum",
        normal(2, 3, 4),
        normal(4),
        label="ranks",
        equation="...j,...j->...",
        shapes=("static", "dynamic"),
        runtime=False,
    ),
]
