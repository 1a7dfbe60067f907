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


def test_summaries_fit_a_table():
    def described():
        """The first | sentence of
        :class:`~onnxtrain.Trainer` and ``x``.

        More.
        """

    assert names_page.summary(described) == r"The first \| sentence of `onnxtrain.Trainer` and `x`."
