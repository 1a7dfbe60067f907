"""Each sentence of a page about what is recognised (labels, columns, weights, probabilities, shapes) names its test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.sampled(1)  # each case is cheap

ROOT = Path(__file__).resolve().parent.parent

# A page, words of its sentence, and the test with the corpus of forms, files or values that shows it.
PROMISES = [
    # probabilities
    ("losses.md", "an ensemble makes it", "losses/test_probability_forms.py::test_cross_entropy_takes_probabilities"),
    (
        "losses.md",
        "or 1 - p behind them",
        "losses/test_probability_forms.py::test_binary_cross_entropy_takes_probabilities",
    ),
    (
        "losses.md",
        "Initializers that are trained prove nothing",
        "losses/test_probability_forms.py::test_nothing_is_proved_by_values_that_are_trained",
    ),
    (
        "losses.md",
        "built on the logits before it",
        "losses/test_probability_forms.py::test_probabilities_are_trained_through_the_logits_behind_them",
    ),
    ("losses.md", "a hint says so", "losses/test_probability_forms.py::test_a_hint_says_what_was_assumed"),
    (
        "losses.md",
        "overrides what is proved",
        "losses/test_probability_forms.py::test_from_logits_overrides_what_is_proved",
    ),
    (
        "losses.md",
        "Where nothing is proved, outputs are logits",
        "losses/test_probability_forms.py::test_other_scores_are_logits",
    ),
    (
        "quantization.md",
        "gets Q/DQ behind it",
        "losses/test_probability_forms.py::test_quantized_probabilities_are_probabilities",
    ),
    ("coming_from.md", "on logits or [probabilities]", "losses/test_probability_forms_torch.py::"),
    # weights
    (
        "training.md",
        "What the file declares comes first",
        "real/test_trained_values_torch.py::test_declared_parameters_are_trained_before_names_and_values_are_asked",
    ),
    ("training.md", "then by values, then by name", "real/test_parameters_real.py::test_trainable_parameters"),
    ("training.md", "identify fixed matrices", "weights/test_fixed_values.py::test_fixed_matrices"),
    (
        "training.md",
        "Fresh and trained weights have none of these values",
        "weights/test_fixed_values.py::test_learned_matrices_are_none",
    ),
    (
        "training.md",
        "One hint names them by kind",
        "weights/test_fixed_values.py::test_a_front_end_is_not_trained_and_one_hint_names_it",
    ),
    (
        "training.md",
        "are classified like initializers and written back",
        "training/test_lifted_weights.py::test_trained_and_written_back",
    ),
    (
        "exporting.md",
        "lists every floating tensor",
        "training/test_lifted_weights.py::test_every_floating_tensor_is_listed_and_trained_by_name",
    ),
    (
        "training.md",
        "are one parameter without the copies",
        "weights/test_repeated.py::test_equal_rows_are_trained_as_the_token_that_they_repeat",
    ),
    (
        "training.md",
        "constants, which are not trained",
        "weights/test_ties.py::test_constants_stay_shared_and_untrained",
    ),
    ("exporting.md", "`tie=True` trains them as one", "weights/test_ties.py::test_tie_trains_both_as_one"),
    (
        "quantization.md",
        "so that a scale keeps its sign",
        "working_copy/test_quantization_scales.py::test_no_scale_is_trained_as_a_plain_number",
    ),
    (
        "quantization.md",
        "counts the elements that stay integers",
        "working_copy/test_quantization_scales.py::test_what_stays_as_it_is_is_counted",
    ),
    # labels
    (
        "training.md",
        "axis 1 behind a convolution",
        "losses/test_class_axis.py::test_where_both_axes_fit_it_is_that_of_the_last_layers_outputs_or_the_one_found_before",
    ),
    (
        "training.md",
        "its class names become labels in their order",
        "data/test_known_label_orders.py::test_the_numbers_of_class_names_stay",
    ),
    (
        "training.md",
        "Classes are the folder names in alphabetical order",
        "data/test_image_folder.py::test_training_on_pictures_equals_training_on_their_arrays",
    ),
    ("training.md", "A target column whose first cell is not a number is a text column", "data/test_csv.py::"),
    # columns
    (
        "training.md",
        "may have the same columns in any order",
        "data/test_columns.py::test_any_order_gives_the_same_bits",
    ),
    (
        "training.md",
        "Tables with missing or unknown columns are refused",
        "data/test_columns.py::test_other_columns_are_refused_by_name",
    ),
    # images
    ("training.md", "gets 0 to 255", "data/test_image_normalization.py::test_a_model_that_scales_bytes_gets_bytes"),
    ("training.md", "rotated by their EXIF tag", "data/test_image_folder.py::test_orientation_follows_the_training"),
    (
        "training.md",
        "images are resized and cut as",
        "data/test_image_sizes.py::test_images_are_resized_and_cut_as_the_author_did",
    ),
    # shapes and axes
    ("training.md", "followed from\n  the inputs through the nodes", "ir/test_batch_axis.py::test_axes_are_followed"),
    (
        "training.md",
        "the graph proves that an input's first axis is the time of a recurrent node",
        "training/test_time_first.py::test_the_time_of_a_recurrent_node_is_found_at_the_input",
    ),
    (
        "training.md",
        "or of an unrolled one, nothing is cut into batches",
        "training/test_time_first.py::test_unrolled_steps_are_a_recurrence",
    ),
    (
        "training.md",
        'the names of the axes ("time", "batch")',
        "training/test_time_first.py::test_names_of_axes_are_a_hint",
    ),
    (
        "training.md",
        "with `shuffle=False`, as for time series, the last fifth",
        "data/test_data.py::test_split_validation",
    ),
]


@pytest.mark.parametrize(("page", "words", "test"), PROMISES, ids=[words for _, words, _ in PROMISES])
def test_a_promise_stands_on_its_page_and_has_its_test(page: str, words: str, test: str) -> None:
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    assert " ".join(words.split()) in text, f"{page} does not say {words!r} any more; change the row with the page"
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    assert name in functions if name else functions, test
