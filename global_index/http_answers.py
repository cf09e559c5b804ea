"""Who holds how much of a chain, for each engine and rank, in Mooncake's form and in Dynamo's.

A run is counted at the fastest medium of each block. `gpu` is what is in HBM, `cpu` what is in HBM
or DRAM, `disk` what is in any tier, so each is at least the one before and differences are the
tokens that come from one medium.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emberkv_proto.chains import chain_hashes
from emberkv_proto.errors import InvalidRequestError
from emberkv_proto.events import Keys
from emberkv_proto.hashing import index_keys
from emberkv_proto.types import ChainHits, EngineHit, HashScheme, NamespaceId, NodeHit, NodeId
from global_index.embedded import GlobalIndex
from global_index.http_bodies import ChainQuestion, HashesQuestion, Shape, TokensQuestion
from global_index.membership import Liveness

Ask = Callable[[Keys], Awaitable[ChainHits]]
"""Who holds how much of the chain with these keys."""


class UnknownModelError(InvalidRequestError):
    """No engine of this model is known, so nobody can say what its blocks are called."""


@dataclass(frozen=True, slots=True)
class ChainKind:
    """What hashes depend on beside a request."""

    namespace_id: NamespaceId
    block_tokens: int
    scheme: HashScheme = HashScheme.EMBER


@dataclass(frozen=True, slots=True)
class Instance:
    """Where requests may go: an engine's rank; or a node on which no engine is known."""

    instance_id: str
    dp_rank: int
    node_id: NodeId
    model: str | None
    kind: ChainKind | None
    """None of a node: it has blocks of any kind."""


@dataclass(frozen=True, slots=True)
class InstanceHit:
    """Tokens of the longest run, and of those the ones in HBM, and in HBM or DRAM."""

    instance_id: str
    dp_rank: int
    tokens: int
    hbm_tokens: int
    dram_tokens: int


def instances(index: GlobalIndex) -> list[Instance]:
    """All engines that are known, by whatever way, and the nodes without any. O(nodes)."""
    found: dict[tuple[NodeId, str, int], Instance] = {}
    for node in index.nodes():
        if node.liveness is Liveness.GONE:
            continue
        for info in node.engines:
            kind = ChainKind(info.namespace_id, info.block_tokens, info.hash_scheme)
            instance = Instance(info.engine_id, info.dp_rank, node.node_id, info.model, kind)
            found[node.node_id, info.engine_id, info.dp_rank] = instance
    for engine in index.engines():
        key, info = engine.key, engine.info
        kind = ChainKind(info.namespace_id, info.block_tokens, info.hash_scheme)
        instance = Instance(key.engine_id, key.dp_rank, key.node_id, info.model, kind)
        found[key.node_id, key.engine_id, key.dp_rank] = instance
    served = {instance.node_id for instance in found.values()}
    for node in index.nodes():
        if node.node_id not in served:
            found[node.node_id, "", 0] = Instance(node.node_id, 0, node.node_id, None, None)
    return list(found.values())


async def answer_tokens(
    known: Sequence[Instance], ask: Ask, question: TokensQuestion
) -> list[InstanceHit]:
    """Raises UnknownModelError when no engine of the model is known."""
    kinds = _kinds(known, question.model)
    hits: dict[ChainKind, ChainHits] = {}
    for kind in kinds:
        hashes = chain_hashes(
            kind.scheme,
            kind.namespace_id,
            question.tokens,
            kind.block_tokens,
            salt=question.salt,
            extra_keys=question.adapter,
        )
        hits[kind] = await ask(index_keys(hashes)) if hashes else ChainHits()
    return list(_found(known, question, hits))


async def answer_hashes(
    known: Sequence[Instance], ask: Ask, question: HashesQuestion
) -> list[InstanceHit]:
    """Raises UnknownModelError; InvalidRequestError when blocks have another size."""
    kinds = _kinds(known, question.model)
    sizes = {kind.block_tokens for kind in kinds}
    wanted = question.block_tokens
    if wanted is not None and wanted not in sizes:
        raise InvalidRequestError(
            f"block_size {wanted}: blocks of {question.model} have"
            f" {' or '.join(str(size) for size in sorted(sizes))} tokens here"
        )
    hits = await ask(question.keys) if question.keys.size else ChainHits()
    asked = [kind for kind in kinds if wanted in (None, kind.block_tokens)]
    return list(_found(known, question, dict.fromkeys(asked, hits)))


def _kinds(known: Sequence[Instance], model: str) -> list[ChainKind]:
    kinds = {i.kind for i in known if i.model == model and i.kind is not None}
    if not kinds:
        models = ", ".join(sorted({i.model for i in known if i.model})) or "no engine at all"
        raise UnknownModelError(f"no engine of model {model!r} is known; there is {models}")
    return sorted(kinds, key=lambda kind: (kind.namespace_id, kind.block_tokens))


def _found(
    known: Iterable[Instance], question: ChainQuestion, hits: dict[ChainKind, ChainHits]
) -> Iterator[InstanceHit]:
    """The hits of those that may be asked about; one that is named is told of in any case."""
    by_kind = {kind: _ByHolder.of(found) for kind, found in hits.items()}
    for instance in known:
        if question.instance_id not in (None, instance.instance_id):
            continue
        if instance.model not in (None, question.model):
            continue
        kinds = [instance.kind] if instance.kind is not None else list(hits)
        found = [by_kind[kind].hit(instance, kind) for kind in kinds if kind in by_kind]
        best = max(found, key=lambda hit: hit.tokens, default=None)
        if best is not None and (best.tokens or question.instance_id is not None):
            yield best


@dataclass(frozen=True, slots=True)
class _ByHolder:
    """Hits of one chain by who has them."""

    engines: Mapping[tuple[NodeId, str, int], EngineHit]
    nodes: Mapping[NodeId, NodeHit]

    @classmethod
    def of(cls, hits: ChainHits) -> _ByHolder:
        return cls(
            {(hit.node_id, hit.engine_id, hit.dp_rank): hit for hit in hits.engines},
            {hit.node_id: hit for hit in hits.nodes},
        )

    def hit(self, instance: Instance, kind: ChainKind) -> InstanceHit:
        """An engine's own hit if its events are followed, else its node's."""
        size = kind.block_tokens
        name, rank = instance.instance_id, instance.dp_rank
        engine = self.engines.get((instance.node_id, name, rank))
        if engine is not None:
            hbm = size * engine.hbm_blocks
            dram = hbm + size * engine.dram_blocks
            return InstanceHit(name, rank, size * engine.hit_blocks, hbm, dram)
        node = self.nodes.get(instance.node_id)
        if node is not None:
            return InstanceHit(name, rank, size * node.hit_blocks, 0, size * node.dram_blocks)
        return InstanceHit(name, rank, 0, 0, 0)


def shaped(question: ChainQuestion, hits: Sequence[InstanceHit]) -> dict[str, Any]:
    """The answer's JSON, in the form of whoever asks like this."""
    by_instance: dict[str, list[InstanceHit]] = {}
    for hit in hits:
        by_instance.setdefault(hit.instance_id, []).append(hit)
    if question.shape is Shape.MOONCAKE:
        return {
            question.tenant: {
                name: _summary(ranks, str.upper) | {"longest_matched": _longest(ranks)}
                for name, ranks in by_instance.items()
            }
        }
    return {
        "scores": {name: _ranks(ranks) for name, ranks in by_instance.items()},
        "frequencies": [],
        "instances": {
            name: {"longest_matched": _longest(ranks)} | _summary(ranks, str)
            for name, ranks in by_instance.items()
        },
    }


def _summary(ranks: Sequence[InstanceHit], named: Any) -> dict[str, Any]:
    return {
        named("gpu"): max(hit.hbm_tokens for hit in ranks),
        named("cpu"): max(hit.dram_tokens for hit in ranks),
        named("disk"): _longest(ranks),
        named("dp"): _ranks(ranks),
    }


def _longest(ranks: Sequence[InstanceHit]) -> int:
    return max(hit.tokens for hit in ranks)


def _ranks(ranks: Sequence[InstanceHit]) -> dict[str, int]:
    """By rank; an engine id that stands on several nodes counts with its best."""
    best: dict[str, int] = {}
    for hit in ranks:
        best[str(hit.dp_rank)] = max(best.get(str(hit.dp_rank), 0), hit.tokens)
    return best
