"""Names, messages and first docstring lines use standard terms of CUDA, NCCL, PyTorch and NumPy.

The tables list retired words, and the places where such a word is a term of the field.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

TESTS = Path(__file__).resolve().parents[1]

# Retired words, each with what to write in its place.
RETIRED = {
    "adversary": "random schedule", "aside": "suspend", "blame": "describe_stall",
    "cargo": "PackInfo", "casualties": "failed_devices",
    "dead death die died dies": "failed; freed (of memory)", "door doors": "validation",
    "face faces": "implementation", "fabric": "MeshState", "flats": "pack_buffers, flat buffers",
    "ghost ghosts": "dry_run", "halves": "reduction groups",
    "house houses room rooms": "package, module", "lawful unlawful": "allowed, forbidden",
    "lend lender lenders lends lent": "external", "mourn mourned mourning": "notify_waiters",
    "parked parking": "deferred_free", "rehearsal": "DryRun", "revive revived": "clear_failure",
    "seam seams": "backend interface", "shuffled": "RandomScheduler", "spine": "main path",
    "taker takers": "consumer", "topology": "reduction_groups", "trail trails": "mark",
    "twin twins": "NumPy reference", "urge urged": "progress",
}  # fmt: skip
# Retired in names only: in sentences some of them are plain English.
RETIRED_IN_NAMES = {
    "arrivals": "gradient inputs", "as_kind as_kinds": "output_type", "become becomes": "update",
    "border": "StreamBoundary", "bring brought": "ensure_accessible", "came_in": "record_input",
    "captures": "MeshState.current", "due": "deadline_scope", "emptied": "reset",
    "explain": "profile", "fence fences": "wait", "fetch pull": "to_local",
    "gather gathered": "wait", "gave give": "submit", "given": "(leave it out)",
    "hand_back handed": "release, broadcast", "joint": "multi", "landed": "copy_to_out",
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
    "gather": "all_gather _all_gather",  # the collective, and by index
    "scatter": "reduce_scatter _reduce_scatter ReduceScatter",  # the collective
    "gathered": "gathered",
    "pull": "optim/agn/* ray/*",  # of AGN
    "push": "optim/agn/* ray/* _push push",  # of AGN, and of a term onto a sum
    "rate": "learning_rate",
    "root": "root",  # of a broadcast, and of a graph
    "serve": "_serve",  # takes in a queue
    "watch": "_watch",  # of a watchdog
}
# The same in messages and first docstring lines, as patterns.
ALLOWED_TEXT = {
    "room": r"(?:no|make) room\b",  # free memory
    "halves": r"halves",  # float16 and bfloat16
    "dead": r"is dead because",  # of Ray's messages
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


def texts(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """First lines of docstrings, and all other literals."""
    docstrings = set()
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str(text)) as constant), *_]:
                    docstrings.add(constant)
                    yield text.strip().partition("\n")[0]
    for node in nodes:
        if isinstance(node, ast.Constant) and node not in docstrings and type(node.value) is str:
            yield node.value


def instead_of(retired: dict[str, str]) -> dict[str, str]:
    """Retired word -> what to write, from a table of lists of words."""
    return {word: instead for listed, instead in retired.items() for word in listed.split()}


IN_TEXTS = instead_of(RETIRED)
IN_NAMES = {**IN_TEXTS, **instead_of(RETIRED_IN_NAMES)}
TEXT = re.compile(rf"(?i)\b(?:{'|'.join(IN_TEXTS)})\b")
NAME = re.compile(rf"_(?:{'|'.join(IN_NAMES)})(?=_)")
EXCEPTIONS = {(word, place) for word, places in ALLOWED.items() for place in places.split()}


def retired_names(
    path: str, nodes: Sequence[ast.AST]
) -> Iterator[tuple[str, str, set[tuple[str, str]]]]:
    """Names of a file, or of itself or its folder, with a retired word, and its exceptions."""
    for name in sorted({*defined(nodes), *path.removesuffix(".py").split("/")}):
        for found in NAME.findall(f"_{'_'.join(words(name))}_"):
            places = {name, *(f"{folder}/*" for folder in PurePosixPath(path).parents)}
            yield name, found[1:], EXCEPTIONS & {(found[1:], place) for place in places}


def retired_texts(path: str, nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Retired words in the messages and the first docstring lines of a file."""
    for text in texts(nodes):
        for found in TEXT.finditer(text):
            word = found[0].lower()
            plain = re.finditer(ALLOWED_TEXT.get(word, r"(?!)"), text, re.IGNORECASE)
            if not any(one.start() <= found.start() < one.end() for one in plain):
                yield f"{path}: {text.strip()!r}: write {IN_TEXTS[word]} for {word!r}"


def test_names_and_texts_use_no_retired_word(sources):
    wrong, needed = [], set()
    for path, nodes in sources.items():
        wrong += retired_texts(path, nodes)
        for name, word, exceptions in retired_names(path, nodes):
            needed |= exceptions
            if not exceptions:
                wrong.append(f"{path}: {name}: write {IN_NAMES[word]} for {word!r}")
    assert not wrong, "\n".join(["", *wrong])
    assert needed == EXCEPTIONS


def test_tests_use_no_retired_word():
    """Neither do their comments. "Halves" may mean 16-bit dtypes in tests."""
    retired = IN_TEXTS.keys() - {"halves"}
    wrong = [
        f"{path.relative_to(TESTS)}: write {IN_TEXTS[word]} for {word!r}"
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__).resolve()
        for word in sorted(retired.intersection(
            found.lower() for found in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", path.read_text("utf-8"))
        ))
    ]  # fmt: skip
    assert not wrong, "\n".join(["", *wrong])


def test_a_retired_word_is_found_wherever_it_stands():
    tree = ast.parse(
        '"""Has a twin."""\n\n'
        "def send_cargo(hand_back, *, MAX_GHOSTS=0):\n"
        '    """Does it.\n\n    Its twin too."""\n'
        "    self.is_lent = all_gather = mourned = hand_back.parking\n"
        "    raise ValueError(f'a dead mesh: {mourned}', 'No room for halves, in a room.')\n"
    )
    nodes = [*ast.walk(tree)]
    names = [name for name, _, allowed in retired_names("ops/door.py", nodes) if not allowed]
    assert names == ["MAX_GHOSTS", "door", "hand_back", "is_lent", "mourned", "send_cargo"]
    assert [line.partition(": write")[0] for line in retired_texts("ops/add.py", nodes)] == [
        "ops/add.py: 'Has a twin.'",
        "ops/add.py: 'No room for halves, in a room.'",
        "ops/add.py: 'a dead mesh:'",
    ]


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
