"""Contracts: what a backend may declare."""

import pytest

from capture_planner.errors import InvalidValue
from capture_planner.modes import GraphSupport
from capture_planner.plugins.backend import Backend
from capture_planner.records.backend import (
    COMMON_FIELDS,
    SPECULATIVE_FIELDS,
    Axis,
    Fill,
    MetadataField,
    PaddingContract,
    Support,
)


def a_field(**changes):
    """A valid field."""
    return MetadataField(**{"name": "kv_indptr", "axis": Axis.REQUEST, "fill": Fill.REPEAT_LAST} | changes)


@pytest.mark.parametrize("changes", [{"value": 0}, {"fill": Fill.CONSTANT}])
def test_field_value_requires_constant_fill(changes):
    """Neither without the other."""
    with pytest.raises(InvalidValue, match="value: needed for the fill constant"):
        a_field(**changes)


def test_padding_contract_rejects_duplicate_fields():
    """Under its own name."""
    with pytest.raises(InvalidValue, match=r"fields\[1\].name: 'kv_indptr' is declared twice"):
        PaddingContract(fields=(a_field(), a_field()))


def test_padding_contract_looks_up_fields_by_name():
    """Whatever their order."""
    contract = PaddingContract(fields=(a_field(name="a"), a_field(name="b")))
    assert contract["b"].name == "b"


@pytest.mark.parametrize("changes", [{"name": "Kv"}, {"dtype": "int16"}, {"scale": 0}, {"offset": 4097}])
def test_field_rejects_values_out_of_bounds(changes):
    """Names, types and sizes have limits."""
    with pytest.raises(InvalidValue):
        a_field(**changes)


def test_support_rejects_long_reasons():
    """At least a character, at most 500."""
    for reason in ("", "a" * 501):
        with pytest.raises(InvalidValue):
            Support(level=GraphSupport.ALWAYS, reason=reason)


def test_common_fields_form_a_padding_contract():
    """No name is given twice."""
    assert len(PaddingContract(fields=COMMON_FIELDS + SPECULATIVE_FIELDS).fields) == 9


def test_backend_protocol_rejects_other_objects():
    """The protocol tells."""
    assert not isinstance(object(), Backend)
