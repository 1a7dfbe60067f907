"""Every public name says what it is, and docs/names.md lists all of them."""

import names_page


def test_every_public_name_is_documented():
    assert names_page.undocumented() == []


def test_the_page_is_up_to_date():
    assert names_page.PAGE.read_text() == names_page.page(), "run python tools/names_page.py"


def test_a_name_without_documentation_is_found(monkeypatch):
    def silent():
        pass

    monkeypatch.setattr("onnxtrain.data.CsvFile", silent)
    assert names_page.undocumented() == ["onnxtrain.data.CsvFile"]


def test_a_summary_is_one_sentence_on_one_line():
    def described():
        """The first | sentence of
        :class:`~onnxtrain.Trainer` and ``x``. Another one.

        More.
        """

    assert names_page.summary(described) == "The first | sentence of `onnxtrain.Trainer` and `x`"


def test_a_long_summary_ends_at_its_colon():
    def described():
        """Softmax cross-entropy of logits: mean over all the labels that count of -w_t log softmax(z)_t."""

    assert names_page.summary(described) == "Softmax cross-entropy of logits"


def test_no_name_is_missing_from_the_page():
    text = names_page.PAGE.read_text()
    for heading, entries in names_page.sections():
        for name, value in entries:
            assert f"`{name}`" in text or not names_page.is_described(value), f"{heading}.{name}"
