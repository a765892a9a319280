"""The cache blocks' book-keeping: no block has two owners unseen, and none is found under what it no longer holds."""

import random

import pytest

from mpi_tp.engine.block_pool import BlockPool, extend_digests
from mpi_tp.engine.kv_cache import BLOCK_SIZE


class PoolModel:
    """What a pool must do, as plainly as possible: users and content of each block, and when it was last released."""

    def __init__(self, num_blocks):
        self.users = [0] * num_blocks
        self.content = [None] * num_blocks
        self.released = [0] * num_blocks
        self.clock = 0

    def free(self):
        return [block for block, users in enumerate(self.users) if users == 0]

    def known(self):
        return {content: block for block, content in enumerate(self.content) if content is not None}

    def took(self, block):
        """Check that a taken block was free, and of those with content the one that was the longest unused."""
        free = self.free()
        assert block in free
        if self.content[block] is not None:
            assert all(self.content[other] is not None for other in free)
            assert self.released[block] == min(self.released[other] for other in free)
        self.users[block], self.content[block] = 1, None

    def release(self, blocks):
        for block in reversed(blocks):
            self.users[block] -= 1
            self.clock += 1
            if self.users[block] == 0:
                self.released[block] = self.clock


@pytest.mark.parametrize("seed", range(20))
def test_a_pool_does_what_its_model_does(seed):
    generator = random.Random(seed)
    num_blocks = generator.randint(1, 12)
    pool, model = BlockPool(num_blocks), PoolModel(num_blocks)
    held = []
    for step in range(400):
        kind = generator.choice(["take", "register", "share", "release"])
        if kind == "take" and pool.num_free:
            block = pool.take()
            model.took(block)
            held.append([block])
        elif kind == "register" and held:
            block, content = generator.choice(held)[0], bytes([generator.randrange(20)])
            if model.content[block] is None:
                pool.register(block, content)
                if content not in model.known():
                    model.content[block] = content
        elif kind == "share":
            wanted = [bytes([generator.randrange(20)]) for _ in range(generator.randint(0, 3))]
            wanted = list(dict.fromkeys(wanted))
            known = model.known()
            count = next((at for at, content in enumerate(wanted) if content not in known), len(wanted))
            found = pool.find(wanted)
            assert found == [known[content] for content in wanted[:count]]
            assert pool.num_free_among(found) == len(set(found) & set(model.free()))
            pool.share(found)
            for block in found:
                model.users[block] += 1
            held += [found] if found else []
        elif kind == "release" and held:
            blocks = held.pop(generator.randrange(len(held)))
            pool.release(blocks)
            model.release(blocks)
        assert pool.num_free == len(model.free()), f"step {step}"
    for blocks in held:
        pool.release(blocks)
    assert sorted(pool.take() for _ in range(num_blocks)) == list(range(num_blocks))
    assert pool.find([bytes([content]) for content in range(20)]) == []


def test_a_block_given_back_too_often_is_noticed():
    pool = BlockPool(2)
    block = pool.take()
    pool.release([block])
    with pytest.raises(AssertionError, match="once too often"):
        pool.release([block])


def test_a_digest_is_that_of_all_tokens_up_to_the_end_of_the_block():
    def digests(tokens, num_blocks):
        result = []
        extend_digests(result, tokens, num_blocks)
        return result

    tokens = [at % 7 for at in range(5 * BLOCK_SIZE)]
    whole = digests(tokens, 5)
    assert len(set(whole)) == 5
    for at in range(5 * BLOCK_SIZE):
        other = digests([*tokens[:at], 1000, *tokens[at + 1 :]], 5)
        same = at // BLOCK_SIZE
        assert other[:same] == whole[:same]
        assert not set(other[same:]) & set(whole)
    grown = digests(tokens, 2)
    extend_digests(grown, tokens, 4)
    extend_digests(grown, tokens, 3)
    assert grown == whole[:4]
