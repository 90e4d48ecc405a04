"""The index of kept blocks: chains are found from their start, the least used go first, and no chain has a hole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.prefix import BLOCK, PrefixIndex

TEXTS = [tuple(range(start, start + 6 * BLOCK)) for start in (0, 1000, 2000)]
BRANCH = (*TEXTS[0][: 2 * BLOCK], *TEXTS[1][: 3 * BLOCK])


def test_a_chain_is_found_as_far_as_it_is_the_same() -> None:
    index = PrefixIndex(100 * BLOCK)
    copies = index.keep("ann", TEXTS[0][: 3 * BLOCK + 7])
    assert [copy.start for copy in copies] == [0, BLOCK, 2 * BLOCK]
    blocks = [copy.block for copy in copies]
    assert index.match("ann", TEXTS[0]) == blocks
    assert index.match("ann", BRANCH) == blocks[:2]
    assert index.match("ann", TEXTS[1]) == []
    assert index.match("bob", TEXTS[0]) == []
    assert [copy.start for copy in index.keep("ann", TEXTS[0])] == [3 * BLOCK, 4 * BLOCK, 5 * BLOCK]


def test_the_same_tokens_after_another_beginning_are_another_block() -> None:
    index = PrefixIndex(100 * BLOCK)
    index.keep("ann", TEXTS[0])
    assert index.match("ann", TEXTS[0][BLOCK:]) == []


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    index = PrefixIndex(6 * BLOCK)
    index.keep("ann", TEXTS[0][: 3 * BLOCK])
    index.keep("ann", TEXTS[1][: 3 * BLOCK])
    index.match("ann", TEXTS[0])
    index.keep("ann", TEXTS[2][:BLOCK])
    assert len(index.match("ann", TEXTS[1])) == 2
    assert len(index.match("ann", TEXTS[0])) == 3
    assert len(index) == 6


@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from([*TEXTS, BRANCH]), st.integers(0, 6 * BLOCK), st.sampled_from("ab")),
        max_size=60,
    ),
    st.integers(0, 12),
)
def test_a_block_that_is_found_holds_its_tokens(
    actions: list[tuple[bool, tuple[int, ...], int, str]], capacity: int
) -> None:
    index, held = PrefixIndex(capacity * BLOCK), {}
    for keeps, text, length, tenant in actions:
        if keeps:
            for block, start in index.keep(tenant, text[:length]):
                assert 0 <= block < capacity
                held[block] = (tenant, text[: start + BLOCK])
        else:
            found = index.match(tenant, text[:length])
            ends = [BLOCK * (number + 1) for number in range(len(found))]
            assert [held[block] for block in found] == [(tenant, text[:end]) for end in ends]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["keep", "hold", "release"]), st.sampled_from([*TEXTS, BRANCH]), st.sampled_from("ab")
        ),
        max_size=60,
    ),
    st.integers(0, 12),
)
def test_what_is_held_stays_whatever_is_kept_meanwhile(
    actions: list[tuple[str, tuple[int, ...], str]], size: int
) -> None:
    index, held = PrefixIndex(size * BLOCK), []
    for action, text, tenant in actions:
        if action == "keep":
            index.keep(tenant, text)
        elif action == "hold":
            keys = index.hold(tenant, text)
            held.append((tenant, text, keys))
        elif held:
            index.release(held.pop()[2])
        assert len(index) <= size
        assert len({key for *_, keys in held for key in keys}) <= size // 2
        for owner, tokens, keys in held:
            assert len(index.match(owner, tokens)) >= len(keys)


def test_what_is_released_gives_way() -> None:
    index = PrefixIndex(4 * BLOCK)
    one, other = tuple(range(2 * BLOCK)), tuple(range(1000, 1000 + 4 * BLOCK))
    index.keep("a", one)
    keys = index.hold("a", one)
    assert len(keys) == 2
    index.keep("a", other)
    assert len(index.match("a", one)) == 2
    index.release(keys)
    index.keep("a", other)
    assert index.match("a", one) == []
