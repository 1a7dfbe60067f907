"""Dates, categories and missing values: a scikit-learn pipeline encodes them, and an ONNX model learns the numbers.

The table is made up: bikes that are hired at three stations, by date, weather and temperature. Some temperatures are
missing. The program writes the network `hires.onnx`, and the whole pipeline `hires.joblib`, which takes such tables.
"""

from pathlib import Path

import joblib
import numpy as np
import pandas as pd
from onnxtrain.sklearn import OnnxRegressor
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler


def hires(days: int = 730) -> pd.DataFrame:
    """Return a row for each day and station, in the order of time."""
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"date": pd.date_range("2023-01-01", periods=days).repeat(3)})
    table["station"] = np.tile(["harbor", "market", "park"], days)
    table["weather"] = rng.choice(["sun", "clouds", "rain"], days).repeat(3)
    season = np.cos(2 * np.pi * (table["date"].dt.dayofyear - 200) / 365)
    table["temperature"] = 12 + 9 * season + rng.normal(0, 2, len(table))
    weekend, rain = table["date"].dt.day_of_week >= 5, table["weather"] == "rain"
    park = table["station"] == "park"
    table["hired"] = 60 + 3 * table["temperature"] + np.where(weekend & park, 50, 0) - np.where(rain, 40, 0)
    table["hired"] += rng.normal(0, 6, len(table))
    table.loc[rng.random(len(table)) < 0.05, "temperature"] = np.nan
    return table


def calendar(dates: pd.DataFrame) -> np.ndarray:
    """Return the season as a point on a circle, and whether it is a weekend, of a column of dates."""
    days = dates.iloc[:, 0].dt
    angle = 2 * np.pi * days.dayofyear / 365.25
    return np.stack([np.sin(angle), np.cos(angle), days.day_of_week >= 5], axis=1)


def main(folder: Path) -> float:
    """Train on the first days, write the model and the pipeline, and return R² of the last days."""
    table = hires()
    train, later = table[: len(table) * 4 // 5], table[len(table) * 4 // 5 :]
    encode = make_column_transformer(
        (FunctionTransformer(calendar), ["date"]),
        (OneHotEncoder(handle_unknown="ignore", sparse_output=False), ["station", "weather"]),
        (make_pipeline(SimpleImputer(add_indicator=True), StandardScaler()), ["temperature"]),
    )
    to_float32 = FunctionTransformer(np.float32)
    regressor = OnnxRegressor(epochs=40, learning_rate=0.01, hidden_layer_sizes=(32,), random_state=0)
    pipeline = make_pipeline(encode, to_float32, regressor)
    pipeline.fit(train.drop(columns="hired"), train["hired"])  # fits the encoders on these days only
    regressor.save(folder / "hires.onnx")
    joblib.dump(pipeline, folder / "hires.joblib")
    return pipeline.score(later.drop(columns="hired"), later["hired"])


if __name__ == "__main__":
    print(f"R² of the last days {main(Path.cwd()):.2f}")
