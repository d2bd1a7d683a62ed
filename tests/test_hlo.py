"""The reader of scheduled programs, on programs small enough to work out by hand."""

import pytest

from remat_scan._hlo import Module, array_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("shape", "size", "space"),
    [
        ("f32[]", 4, 0),
        ("f32[4,8]{1,0}", 128, 0),
        ("bf16[3,5]{1,0}", 30, 0),
        ("s4[10]{0}", 5, 0),
        ("pred[7]{0}", 7, 0),
        ("f32[0,4]{1,0}", 0, 0),
        # Tiles pad the two minor dimensions, in the layout's order.
        ("f32[3,5]{1,0:T(8,128)}", 8 * 128 * 4, 0),
        ("f32[3,5,300]{0,2,1:T(8,128)}", 5 * 304 * 128 * 4, 0),
        ("bf16[2,8,128]{2,1,0:T(8,128)(2,1)}", 2 * 8 * 128 * 2, 0),
        ("f32[4]{0:T(128)S(1)}", 512, 1),
        ("f32[4]{0:S(5)}", 16, 5),
        ("token[]", 0, 0),
    ],
)
def test_sizes(shape, size, space):
    assert array_bytes(shape) == (size, space)


def program(body: str, head: str = "", more: str = "") -> str:
    entry = f"ENTRY %main (p: f32[1]) -> f32[1] {{\n{body}\n}}\n"
    return f"HloModule m, is_scheduled=true{head}\n\n{more}\n{entry}"


def peak(text: str) -> int:
    return sum(b.bytes for b in Module(text).at_peak())


M = "f32[262144]{0}"  # one MiB


def test_a_chain_keeps_two_alive_and_its_argument():
    text = program(
        f"""  %p = {M} parameter(0)
  %a = {M} negate(%p)
  %b = {M} negate(%a)
  ROOT %c = {M} negate(%b)"""
    )
    assert peak(text) == 3 * MIB


def test_what_is_read_late_stays_alive():
    text = program(
        f"""  %p = {M} parameter(0)
  %a = {M} negate(%p)
  %b = {M} negate(%a)
  %c = {M} negate(%b)
  ROOT %d = {M} add(%c, %a)"""
    )
    assert peak(text) == 4 * MIB


@pytest.mark.parametrize(("kind", "mebibytes"), [("kLoop", 3), ("kInput", 4)])
def test_an_elementwise_fusion_writes_over_an_operand_that_dies(kind, mebibytes):
    text = program(
        f"""  %p = {M} parameter(0)
  %a = {M} negate(%p)
  %b = {M} negate(%p)
  %c = {M} fusion(%a, %b), kind={kind}, calls=%f
  ROOT %d = {M} fusion(%c, %p), kind={kind}, calls=%f"""
    )
    assert peak(text) == mebibytes * MIB


def test_views_and_donated_arguments_cost_nothing():
    text = program(
        f"""  %p = {M} parameter(0)
  %v = f32[512,512]{{1,0}} bitcast(%p)
  %t = ({M}, f32[512,512]{{1,0}}) tuple(%p, %v)
  %g = {M} get-tuple-element(%t), index=0
  ROOT %a = {M} negate(%g)""",
        head=", input_output_alias={ {}: (0, {}, may-alias) }",
    )
    assert peak(text) == MIB


def test_host_memory_does_not_count():
    text = program(
        f"""  %p = {M} parameter(0)
  %h = f32[262144]{{0:S(5)}} copy(%p)
  ROOT %d = {M} copy(%h)"""
    )
    assert peak(text) == 2 * MIB


def test_asynchronous_copies_are_one_buffer():
    text = program(
        f"""  %p = {M} parameter(0)
  %s = ({M}, {M}, u32[]) copy-start(%p)
  ROOT %d = {M} copy-done(%s)"""
    )
    assert peak(text) == 2 * MIB


def test_the_inside_of_a_loop_counts_and_its_carry_is_in_place():
    body = f"""%body (c: (s32[], {M})) -> (s32[], {M}) {{
  %c = (s32[], {M}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = {M} get-tuple-element(%c), index=1
  %y = {M} negate(%x)
  %z = {M} negate(%y)
  ROOT %r = (s32[], {M}) tuple(%i, %z)
}}
%cond (c: (s32[], {M})) -> pred[] {{
  %cc = (s32[], {M}) parameter(0)
  ROOT %t = pred[] constant(false)
}}
"""
    text = program(
        f"""  %p = {M} parameter(0)
  %n = s32[] parameter(1)
  %t = (s32[], {M}) tuple(%n, %p)
  %w = (s32[], {M}) while(%t), condition=%cond, body=%body
  ROOT %o = {M} get-tuple-element(%w), index=1""",
        more=body,
    )
    # The argument, which the carry shares, and one buffer inside.
    assert peak(text) == 2 * MIB + 4


def test_source_lines_of_both_formats():
    old = program(
        f"""  %p = {M} parameter(0)
  ROOT %a = {M} negate(%p), metadata={{op_name="jit(f)/neg" source_file="user.py" source_line=12}}"""
    )
    assert {b.source for b in Module(old).at_peak()} == {"p", "user.py:12"}
    tables = """
FileNames
1 "user.py"
2 "site-packages/other.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=99 end_line=99 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

"""
    new = program(
        f"""  %p = {M} parameter(0)
  ROOT %a = {M} negate(%p), metadata={{op_name="jit(f)/neg" stack_frame_id=2}}""",
        more=tables,
    )
    assert {b.source for b in Module(new).at_peak()} == {"p", "user.py:12"}


def test_text_that_is_no_program():
    assert Module("").at_peak() == []
