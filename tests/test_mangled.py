"""Mangled names as people write them."""

import pytest

from ptxlab.mangled import demangle, demangle_message, find_symbols, name_of, normalise, parameters_of


@pytest.mark.parametrize(
    ("symbol", "name", "whole"),
    [
        ("_Z5scalePfi", "scale", "scale(float*, int)"),
        ("_ZN2ns3addIfLi3EEEvPT_j", "ns::add<float, 3>", "ns::add<float, 3>(float*, unsigned int)"),
        ("_ZN36_GLOBAL__N__cf527732_4_a_cu_2a37b1f66hiddenEPf", "hidden", "hidden(float*)"),
        ("_ZZN2ns3addIfLi3EEEvPT_jE3buf", "buf", "ns::add<float, 3>(float*, unsigned int)::buf"),
        ("plain", "plain", "plain"),
        ("_Znonsense", "_Znonsense", "_Znonsense"),
    ],
)
def test_demangling(symbol: str, name: str, whole: str) -> None:
    assert (name_of(symbol), demangle(symbol)) == (name, whole)


def test_types_of_parameters() -> None:
    assert parameters_of("_ZN2ns4modeILNS_4ModeE1EEEvPK6__halfNS_1PEPf") == ("__half const*", "ns::P", "float*")
    assert parameters_of("_Z4nonev") == () and parameters_of("plain") is None


def test_messages() -> None:
    assert demangle_message("call _ZN2ns3addIfLi3EEEvPT_j, (_Z5scalePfi)") == "call ns::add<float, 3>, (scale)"
    assert demangle_message("my_Z5scalePfi") == "my_Z5scalePfi"


def test_one_name_has_many_spellings() -> None:
    symbols = ["_Z5scalePfi", "_Z5scalePdm", "_ZN2ns3addIfLi3EEEvPT_j"]
    for spelling in ("add", "ns::add", "::ns::add< float,(int)3 >", "ns::add<float, 3u>", "add<float,3>"):
        assert find_symbols(symbols, spelling) == symbols[2:]
    assert find_symbols(symbols, "scale") == symbols[:2] and find_symbols(symbols, "scale(float *, int)") == symbols[:1]
    assert find_symbols(symbols, "dd") == []
    assert normalise("f< 3UL , -2 >") == "f<3,-2>"
