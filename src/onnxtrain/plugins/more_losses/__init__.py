"""Losses of numbers, counts, quantiles, margins, ranks and survival times, by Keras's names where it has them."""

from onnxtrain.errors.registries import register_loss, register_metric

_LOSSES = {
    "numbers": {
        "poisson": "Poisson",
        "gamma": "Gamma",
        "quantile": "Quantile",
        "log_cosh": "LogCosh",
        "mean_absolute_percentage_error": "MeanAbsolutePercentageError",
        "mean_squared_logarithmic_error": "MeanSquaredLogarithmicError",
        "cosine_similarity": "CosineSimilarity",
    },
    "classes": {
        "kl_divergence": "KLDivergence",
        "hinge": "Hinge",
        "squared_hinge": "SquaredHinge",
        "categorical_hinge": "CategoricalHinge",
        "ordinal": "Ordinal",
        "tversky": "Tversky",
        "circle": "Circle",
    },
    "survival": {"cox": "Cox"},
}


def register() -> None:
    """Add the losses, and metrics of survival times and numbers."""
    for module, losses in _LOSSES.items():
        for name, loss in losses.items():
            register_loss(name, f"{__name__}.{module}:{loss}")
    register_metric("concordance_index", f"{__name__}.survival:concordance_index")
    register_metric("rmse", f"{__name__}.metrics:RMSE")
    register_metric("cosine_similarity", f"{__name__}.metrics:COSINE_SIMILARITY")
