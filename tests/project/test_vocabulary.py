"""Names use standard terms of CUDA, NCCL, PyTorch and NumPy.

The tables list words that are retired in names, and the names in which such a word is a term of the
field. Those of ``.ci/retired_words.txt`` are retired everywhere; ``codespell`` finds them.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

# Retired words, each with what to write in its place. In sentences some are plain English.
RETIRED = {
    "arrivals": "gradient inputs", "as_kind as_kinds": "output_type", "become becomes": "update",
    "border": "StreamBoundary", "bring brought": "ensure_accessible", "came_in": "record_input",
    "captures": "MeshState.current", "due": "deadline_scope", "emptied": "reset",
    "explain": "profile", "fence fences": "wait", "fetch pull": "to_local",
    "gather gathered": "wait", "gave give": "submit", "given": "(leave it out)",
    "halves": "reduction groups", "hand_back handed": "release, broadcast",
    "joint": "multi", "landed": "copy_to_out",
    "leader leaders": "device", "lose loses lost": "mark_failed, failed", "near": "colocated",
    "one_call": "StreamScope", "outline": "Signature", "patience": "WaitPolicy",
    "push": "PushPlan (AGN only)", "rate rates": "lr, bandwidth", "reaches": "peer_access",
    "refusals refuse": "unsupported", "rest1": "one_minus_beta1", "root": "sqrt", "scatter": "wait",
    "serve served": "take_queue", "settled": "resolve", "shown": "as_result", "spread": "unpack",
    "ticket": "PendingTake", "told": "on_partial_failure", "travel": "PackInfo", "walk": "backward",
    "watch": "PendingCall", "wide": "acc_dtype",
}  # fmt: skip

# A retired word -> the names in which it is a term of the field, or plain English; ``PATH*`` stands
# for all names of the files whose path begins so.
ALLOWED = {
    "gather": "all_gather _all_gather torch/*",  # the collective, and by index
    "scatter": "reduce_scatter _reduce_scatter ReduceScatter torch/*",  # the collective
    "gathered": "gathered",
    "lost": "lost",  # messages of a simulated network
    "pull": "optim/agn/* ray/*",  # of AGN
    "push": "optim/agn/* ray/* _push push",  # of AGN, and of a term onto a sum
    "rate": "learning_rate",
    "root": "root rootRank",  # of a broadcast, and of a graph
    "serve": "_serve",  # takes in a queue
    "watch": "_watch",  # of a watchdog
}


def words(name: str) -> list[str]:
    """The lower-case words of an identifier."""
    return [word.lower() for word in re.split(r"_+|(?<=[a-z0-9])(?=[A-Z])", name) if word]


def defined(nodes: Sequence[ast.AST]) -> set[str]:
    """Every identifier that a file defines or assigns."""
    found = set()
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(asname=str(name)):
                found.add(name)
    return found


INSTEAD = {word: instead for listed, instead in RETIRED.items() for word in listed.split()}
NAME = re.compile(rf"_(?:{'|'.join(INSTEAD)})(?=_)")
EXCEPTIONS = {(word, place) for word, places in ALLOWED.items() for place in places.split()}


def retired_names(
    path: str, nodes: Sequence[ast.AST]
) -> Iterator[tuple[str, str, set[tuple[str, str]]]]:
    """Names of a file, or of itself or its folder, with a retired word, and its exceptions."""
    for name in sorted({*defined(nodes), *path.removesuffix(".py").split("/")}):
        for found in NAME.findall(f"_{'_'.join(words(name))}_"):
            places = {name, *(f"{folder}/*" for folder in PurePosixPath(path).parents)}
            yield name, found[1:], EXCEPTIONS & {(found[1:], place) for place in places}


def test_names_have_no_retired_word(sources):
    wrong, needed = [], set()
    for path, nodes in sources.items():
        for name, word, exceptions in retired_names(path, nodes):
            needed |= exceptions
            if not exceptions:
                wrong.append(f"{path}: {name}: write {INSTEAD[word]} for {word!r}")
    assert not wrong, "\n".join(["", *wrong])
    assert needed == EXCEPTIONS


def test_a_retired_word_is_found_in_every_name():
    tree = ast.parse(
        "def send_joint(hand_back, *, MAX_RATES=0):\n"
        "    self.is_given = all_gather = served = hand_back.watch\n"
    )
    names = [
        name
        for name, _, allowed in retired_names("ops/emptied.py", [*ast.walk(tree)])
        if not allowed
    ]
    assert names == ["MAX_RATES", "emptied", "hand_back", "is_given", "send_joint", "served"]


def test_a_parameter_that_takes_cross_device_ops_is_called_so(sources):
    called = {
        node.arg
        for nodes in sources.values()
        for node in nodes
        if isinstance(node, ast.arg)
        and node.annotation
        and re.match(r"\w*CrossDeviceOps\b", ast.unparse(node.annotation))
    }
    assert called == {"cross_device_ops"}


# Classes that users see as `gr.X` and `gr.ray.X` or `gr.torch.X`.
TWO_PUBLIC = {"AGNCenter", "ConditionalAccumulator", "Optimizer", "SparseConditionalAccumulator"}


def test_each_class_and_alias_name_has_one_meaning(sources):
    owners: dict[str, set[str]] = {}
    for path, nodes in sources.items():
        for node in nodes[0].body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign):
                names = [each.id for each in node.targets if isinstance(each, ast.Name)]
            for name in names:
                if re.fullmatch(r"_*[A-Z]\w*[a-z]\w*", name):
                    owners.setdefault(name.lstrip("_"), set()).add(path)
    found = {name: paths for name, paths in owners.items() if len(paths) > 1}
    assert found.keys() == TWO_PUBLIC, found
