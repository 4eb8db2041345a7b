"""The mutations fit the code and the tests that there are."""

import ast
from pathlib import Path

import pytest

import mutate_live
import mutate_offline
from support.mutations import PACKAGE, ROOT

EVERY = (*mutate_live.MUTATIONS, *mutate_offline.MUTATIONS)


def test_there_is_one_mutation_of_a_name():
    names = [mutation.name for mutation in EVERY]
    assert len(set(names)) == len(names) > 0


@pytest.mark.slow
@pytest.mark.parametrize("mutation", EVERY, ids=lambda mutation: mutation.name)
def test_a_mutation_fits_the_code_and_its_tests_are_there(mutation):
    for file, old, new in mutation.edits:
        source = (PACKAGE / file).read_text(encoding="utf-8")
        assert source.count(old) == 1
        assert ast.dump(ast.parse(source)) != ast.dump(ast.parse(source.replace(old, new)))
    for test in mutation.tests.split():
        file, _, name = test.partition("::")
        assert f"def {name}" in Path(ROOT, "tests", file).read_text(encoding="utf-8")
