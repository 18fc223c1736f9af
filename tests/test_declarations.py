"""What a CUDA C++ text declares, and what is left of it without its host functions."""

from ptxlab.declarations import declarations, kernels, launches, own_text, remove_host_declarations

TEXT = """// __global__ void commented(int* x) {}
#define KERNEL __global__ void
namespace a::b {
template <typename T, int N = (3 > 2)>
__global__ void __launch_bounds__(256, 2) first(const T* __restrict__ x, T (&y)[4], int n = 3) {
    auto f = [](int i) { return i; };
}
}  // namespace
extern "C" { __global__ void second(float* x) {} }
extern "C" __global__ void third(void) {}
struct S { int n; S(int m) : n(m) {} __device__ int get() const { return n; } };
static const int table[] = {1, 2, 3};
int main() { a::b::first<float, 4><<<1, 2>>>(0, 0); second<<<1, 1>>>(nullptr); return '{'; }
"""


def test_kernels_have_namespace_template_and_parameters() -> None:
    first, second, third = kernels(TEXT)
    assert (first.name, first.template, first.linkage) == ("a::b::first", "typename T, int N = (3 > 2)", "C++")
    assert first.parameters[0] == "const T* __restrict__ x" and first.parameter_names[::2] == ("x", "n")
    assert (second.name, second.linkage, second.parameter_names) == ("second", "C", ("x",))
    assert (third.name, third.linkage) == ("third", "C")


def test_launches_are_listed_as_they_are_written() -> None:
    assert launches(TEXT) == ["a::b::first<float, 4>", "second"]


def test_host_functions_are_cut_and_lines_stay() -> None:
    lines = TEXT.splitlines()
    places = [(len(lines), lines[-1].index("main") + 1), (11, lines[10].index("S(int") + 1)]
    cut = remove_host_declarations(TEXT, places)
    assert "main" not in cut and "S(int" not in cut and "get() const" in cut
    assert [len(line) for line in cut.splitlines()] == [len(line) for line in lines]


def test_constexpr_functions_are_given_to_the_device_and_cut_if_they_are_wrong_there() -> None:
    text = "struct S {\n    // constexpr\n    template <class T> static constexpr T twice(T x) { return 2 * x; }\n};\n"
    place = (3, text.splitlines()[2].index("twice") + 1)
    changed = remove_host_declarations(text, [place])
    assert "static __attribute__((device)) constexpr T twice(T x)" in changed
    assert remove_host_declarations(changed, [], [place]) == remove_host_declarations(changed, [place]) != changed
    assert (
        "twice" not in remove_host_declarations(changed, [place])
        and remove_host_declarations(text, [], [place]) == text
    )


def test_what_is_for_the_device_is_never_cut() -> None:
    for line, name in ((5, "first"), (9, "second"), (11, "get")):
        column = TEXT.splitlines()[line - 1].index(name) + 1
        assert remove_host_declarations(TEXT, [(line, column)]) == TEXT


def test_a_declaration_ends_where_it_ends() -> None:
    heads = [
        declaration.head.split()[-1] for declaration in declarations("int a = f({1, 2}); void g() { { } } int b{3};")
    ]
    assert heads == ["2})", "g()", "b{3}"]


def test_text_of_the_compilers_own_headers_is_left_out() -> None:
    text = '#line 1 "k.cu"\nint a;\n#line 1 "/cuda/include/x.h"\nint b;\n# 2 "/cuda/bin/../include/y.h"\nint d;\n'
    text += '# 3 "/mine/y.h" 2\nint c;\n'
    assert own_text(text, ("/cuda/include",)).split() == ["int", "a;", "int", "c;"]
