"""The benchmarks' reader of collectives, on small programs whose bytes are worked out by hand."""

from benchmarks.overlap import collectives, copies_from_host

HEAD = """HloModule m, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %r = f32[] add(%a, %b)
}

%product (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (s: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %s = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%s), index=1
  %g0 = ((f32[8,8]{1,0}), f32[64,8]{1,0}) all-gather-start(%x), dimensions={0}
  %h = f32[8,8]{1,0} fusion(%x), kind=kOutput, calls=%product, backend_config={"estimated_cycles":"5"}
  %g1 = f32[64,8]{1,0} all-gather-done(%g0)
  %late = f32[1,8]{1,0} reduce-scatter(%h), dimensions={0}, to_apply=%sum
  ROOT %t = (s32[], f32[8,8]{1,0}) tuple(%i, %h)
}

%condition (s: (s32[], f32[8,8])) -> pred[] {
  %s = (s32[], f32[8,8]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

%gather (p: f32[8,8]) -> f32[64,8] {
  %p.1 = f32[8,8]{1,0} parameter(0)
  ROOT %g = f32[64,8]{1,0} all-gather(%p.1), dimensions={0}
}

%product_and_sum (p: f32[8,8]) -> f32[8,8] {
  %p.2 = f32[8,8]{1,0} parameter(0)
  %d.2 = f32[8,8]{1,0} dot(%p.2, %p.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %r.2 = f32[8,8]{1,0} all-reduce(%d.2), to_apply=%sum
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
"""
LOOP = """  %zero = s32[] constant(0)
  %start = (s32[], f32[8,8]{1,0}) tuple(%zero, %x)
  %loop = (s32[], f32[8,8]{1,0}) while(%start), condition=%condition, body=%body"""
TRIPS = ', backend_config={"known_trip_count":{"n":"3"}}'
ARRAY, GATHERED = 8 * 8 * 4, 64 * 8 * 4


def read(*lines):
    end = "  ROOT %out = f32[8,8]{1,0} copy(%x)\n}\n"
    return collectives(HEAD + "\n".join(lines) + "\n" + end)


def test_a_gather_beside_a_product():
    found = read(
        "  %s0 = ((f32[8,8]{1,0}), f32[64,8]{1,0}) all-gather-start(%x), dimensions={0}",
        "  %m = f32[8,8]{1,0} fusion(%x), kind=kOutput, calls=%product",
        "  %s1 = f32[64,8]{1,0} all-gather-done(%s0)",
    )
    assert found == {
        "entry_bytes": GATHERED,
        "entry_beside_bytes": GATHERED,
        "loop_bytes": 0,
        "loop_beside_bytes": 0,
        "estimated_cycles": None,
    }


def test_what_is_not_beside_compute():
    """A product before and after, an addition between, and a pair that runs synchronously."""
    found = read(
        "  %m0 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "  %s0 = f32[8,8]{1,0} all-reduce-start(%x), to_apply=%sum",
        "  %a = f32[8,8]{1,0} add(%x, %x)",
        "  %s1 = f32[8,8]{1,0} all-reduce-done(%s0)",
        "  %m1 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "  %t0 = f32[8,8]{1,0} all-reduce-start(%x), to_apply=%sum",
        "  %m2 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        '  %t1 = f32[8,8]{1,0} all-reduce-done(%t0), backend_config={"is_sync":true}',
    )
    assert (found["entry_bytes"], found["entry_beside_bytes"]) == (2 * ARRAY, 0)


def test_a_reduce_scatter_counts_what_goes_in():
    found = read("  %r = f32[1,8]{1,0} reduce-scatter(%x), dimensions={0}, to_apply=%sum")
    assert (found["entry_bytes"], found["entry_beside_bytes"]) == (ARRAY, 0)


def test_a_loop_counts_as_often_as_it_runs():
    found = read(LOOP + TRIPS)
    assert found["entry_bytes"] == 0
    assert found["loop_bytes"] == 3 * (GATHERED + ARRAY)
    assert found["loop_beside_bytes"] == 3 * GATHERED
    assert found["estimated_cycles"] == 3 * 5
    assert read(LOOP)["loop_bytes"] == GATHERED + ARRAY  # a count nobody knows


COUNTED = """
%steps (s: (s32[], s32[], f32[8,8])) -> (s32[], s32[], f32[8,8]) {
  %s.1 = (s32[], s32[], f32[8,8]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %by = s32[] get-tuple-element(%s.1), index=1
  %x.1 = f32[8,8]{1,0} get-tuple-element(%s.1), index=2
  %g.1 = f32[64,8]{1,0} all-gather(%x.1), dimensions={0}
  %next = s32[] add(%i.1, %by)
  ROOT %t.1 = (s32[], s32[], f32[8,8]{1,0}) tuple(%next, %by, %x.1)
}

%below (s: (s32[], s32[], f32[8,8])) -> pred[] {
  %s.2 = (s32[], s32[], f32[8,8]{1,0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%s.2), index=0
  %bound = s32[]{:T(128)} constant(8)
  ROOT %c.2 = pred[] compare(%i.2, %bound), direction=LT
}

ENTRY"""


def test_a_loop_whose_count_follows_from_its_condition():
    """From 1 below 8 in steps of 3: 1, 4, 7."""
    text = HEAD.replace("\nENTRY", COUNTED)
    text += """  %one = s32[] constant(1)
  %first = s32[] copy(%one)
  %three = s32[] constant(3)
  %state = (s32[], s32[], f32[8,8]{1,0}) tuple(%first, %three, %x)
  %w = (s32[], s32[], f32[8,8]{1,0}) while(%state), condition=%below, body=%steps
  ROOT %out = f32[8,8]{1,0} get-tuple-element(%w), index=2
}
"""
    assert collectives(text)["loop_bytes"] == 3 * GATHERED


def test_a_loop_with_a_product_is_compute():
    found = read(
        "  %s0 = ((f32[8,8]{1,0}), f32[64,8]{1,0}) all-gather-start(%x), dimensions={0}",
        LOOP + TRIPS,
        "  %s1 = f32[64,8]{1,0} all-gather-done(%s0)",
    )
    assert found["entry_beside_bytes"] == GATHERED


def test_a_collective_on_another_core_of_a_tpu():
    """Its operand comes with the update: the product before that is not beside it."""
    product = "f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    lines = [
        "  %c0 = ((), (), s32[8]{0}) custom-call-start(), called_computations={%gather}",
        f"  %m0 = {product}",
        "  %c1 = ((f32[8,8]{1,0}), f32[64,8]{1,0}, s32[8]{0}) custom-call-update(%c0, %x)",
        "  %c2 = f32[64,8]{1,0} custom-call-done(%c1)",
    ]
    found = read(*lines)
    assert (found["entry_bytes"], found["entry_beside_bytes"]) == (GATHERED, 0)
    lines.insert(3, f"  %m1 = {product}")
    found = read(*lines)
    assert (found["entry_bytes"], found["entry_beside_bytes"]) == (GATHERED, GATHERED)


def test_a_collective_fused_with_a_product():
    found = read("  %f = f32[8,8]{1,0} fusion(%x), kind=kCustom, calls=%product_and_sum")
    assert (found["entry_bytes"], found["entry_beside_bytes"]) == (ARRAY, ARRAY)


def test_copies_from_the_host():
    """Two come back, one of them beside a product; one goes there, one stays on the device."""
    device, host = "f32[8,8]{1,0}", "f32[8,8]{1,0:S(5)}"
    lines = [
        f"  %there = ({host}, {device}, u32[]) copy-start(%x)",
        f"  %moved = ({device}, {device}, u32[]) copy-start(%x)",
        f"  %h = {host} copy-done(%there)",
        f"  %back0 = ({device}, {host}, u32[]) copy-start(%h)",
        f"  %a = {device} copy-done(%back0)",
        f"  %back1 = ({device}, {host}, u32[]) copy-start(%h)",
        f"  %m = {device} fusion(%x), kind=kOutput, calls=%product",
        f"  %b = {device} copy-done(%back1)",
        f"  %n = {device} copy-done(%moved)",
        f"  ROOT %out = {device} copy(%b)",
    ]
    found = copies_from_host(HEAD + "\n".join(lines) + "\n}\n")
    assert found == {"from_host_bytes": 2 * ARRAY, "from_host_beside_bytes": ARRAY}
