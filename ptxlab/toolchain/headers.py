"""Headers of the C and C++ libraries, which NVRTC has not: those of `cuda::std` under the names that files include.

They are for files that do not compile without them. All else is compiled as if they were not there.
"""

import re

_BOTH = ("assert", "float", "limits", "math", "stddef", "stdint", "stdlib", "string")  # <math.h> and <cmath>
_CPP = (
    *("algorithm", "array", "atomic", "bit", "complex", "concepts", "functional", "initializer_list", "iterator"),
    *("limits", "numeric", "optional", "tuple", "type_traits", "utility", "variant"),
)
_NAMES = {f"c{name}": f"c{name}" for name in _BOTH} | {f"{name}.h": f"c{name}" for name in _BOTH} | {n: n for n in _CPP}
_MISSING = re.compile(r'cannot open source file "([^"]+)"')

BY_NAME = {
    name: f"#pragma once\n#include <cuda/std/{of}>\nnamespace cuda {{ namespace std {{}} }}\n"
    "namespace std { using namespace cuda::std; }\n"
    for name, of in _NAMES.items()
} | {
    "stdio.h": "",  # `printf` is there
    "cstdio": "namespace std { using ::printf; }\n",
    # The driver's functions are for the host; kernels take its tensor maps.
    "cuda.h": "#pragma once\nstruct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; };\n"
    "typedef CUtensorMap_st CUtensorMap;\n",
}


def lacks(log: str) -> bool:
    """Whether a compilation failed since one of these was not there."""
    return any(name in BY_NAME for name in _MISSING.findall(log))
