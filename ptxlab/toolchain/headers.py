"""Headers that NVRTC has not: those of `cuda::std` under the names that files include, and stand-ins for the host's.

They are for files that do not compile without them. All else is compiled as if they were not there.
"""

import re

_BOTH = ("assert", "float", "limits", "math", "stddef", "stdint", "stdlib", "string")  # <math.h> and <cmath>
_CPP = (
    *("algorithm", "array", "atomic", "bit", "complex", "concepts", "functional", "initializer_list", "iterator"),
    *("limits", "numeric", "optional", "tuple", "type_traits", "utility", "variant"),
)
_NAMES = {f"c{name}": f"c{name}" for name in _BOTH} | {f"{name}.h": f"c{name}" for name in _BOTH} | {n: n for n in _CPP}
# Only host functions use what these declare; those are left out (`nvrtc`).
_HOST_NAMES = (
    "cctype cerrno cfenv chrono cinttypes condition_variable csignal cstdarg ctime cwchar cxxabi.h deque dirent.h "
    "dlfcn.h errno.h exception execution filesystem fstream future getopt.h inttypes.h iomanip ios iosfwd "
    "iostream istream list locale map memory mutex new numbers ostream queue random ranges ratio regex set "
    "shared_mutex signal.h span sstream stack stdarg.h stdexcept string string_view strings.h sys/stat.h "
    "sys/time.h sys/types.h system_error thread time.h typeindex typeinfo unistd.h unordered_map unordered_set "
    "vector cuda_profiler_api.h curand.h cublas_v2.h nvToolsExt.h nvtx3/nvToolsExt.h "
)
_MISSING = re.compile(r'cannot open source file "([^"]+)"')

BY_NAME = (
    dict.fromkeys(_HOST_NAMES.split(), "")
    | {
        name: f"#pragma once\n#include <cuda/std/{std_name}>\nnamespace cuda {{ namespace std {{}} }}\n"
        "namespace std { using namespace cuda::std; }\n"
        for name, std_name in _NAMES.items()
    }
    | {
        "stdio.h": "",  # `printf` is there
        "cstdio": "namespace std { using ::printf; }\n",
        # The driver's functions are for the host; kernels take its tensor maps.
        "cuda.h": "#pragma once\nstruct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; };\n"
        "typedef CUtensorMap_st CUtensorMap;\n",
    }
)

_MATH = {
    "M_E": "2.7182818284590452354", "M_LOG2E": "1.4426950408889634074", "M_LOG10E": "0.43429448190325182765",
    "M_LN2": "0.69314718055994530942", "M_LN10": "2.30258509299404568402", "M_PI": "3.14159265358979323846",
    "M_PI_2": "1.57079632679489661923", "M_PI_4": "0.78539816339744830962", "M_1_PI": "0.31830988618379067154",
    "M_2_PI": "0.63661977236758134308", "M_2_SQRTPI": "1.12837916709551257390", "M_SQRT2": "1.41421356237309504880",
    "M_SQRT1_2": "0.70710678118654752440", "INFINITY": "__int_as_float(0x7f800000)",
    "NAN": "__int_as_float(0x7fffffff)", "HUGE_VAL": "__longlong_as_double(0x7ff0000000000000ll)",
    "HUGE_VALF": "__int_as_float(0x7f800000)",
}  # fmt: skip
_WHOLE_CUB = "CCCL_DISABLE_CUB_NVRTC_COMPATIBILITY_CHECK"  # <cub/cub.cuh> names it where it refuses NVRTC
# nvcc reads <cmath> and <stdlib.h> of the host before each file. Reading the first of these headers takes a second.
# Each constant has its own. They come last: <cuda/std/cmath> defines INFINITY and NAN whether they are there or not.
BEFOREHAND = {
    "ptxlab/what_nvcc_includes.h": "#include <cmath>\n#include <cstdint>\n#include <limits>\n#include <type_traits>\n",
    "ptxlab/whole_cub.h": f"#define {_WHOLE_CUB}\n",
    **{f"ptxlab/{name}.h": f"#ifndef {name}\n#define {name} {number}\n#endif\n" for name, number in _MATH.items()},
}
_UNDEFINED = re.compile(r'identifier "(\w+)" is undefined|(name must be a namespace|namespace "std" has no member)')
_STANDARD = {"std", "FLT_MAX", "FLT_MIN", "INT_MAX", "UINT_MAX", "INT_MIN"} | {
    f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


def lacks_standard_header(log: str) -> bool:
    """Check whether a compilation failed because a standard header was missing."""
    return any(name in BY_NAME for name in _MISSING.findall(log))


def missing_beforehand(log: str) -> set[str]:
    """Return the headers of `BEFOREHAND` whose lack made a compilation fail."""
    standard, whole_cub, *_ = BEFOREHAND
    matches = _UNDEFINED.findall(log)
    return (
        {f"ptxlab/{name}.h" for name, _ in matches if name in _MATH}
        | {standard for name, std_problem in matches if name in _STANDARD or std_problem}
        | ({whole_cub} if _WHOLE_CUB in log else set())
    )
