"""The ladder as a picture: a node for each file, an edge to each child with its new lines."""
from docs.algorithm import algorithms, children, ideas

WIDTH, HEIGHT = 118, 34     # of a node
ACROSS, DOWN = 186, 50      # from node to node


def place(name: str, depth: int, top: float, places: dict) -> float:
    """Place a file and all below it, from `top` down. Return the first free row."""
    row, rows = top, []
    for child in children(name):
        row = place(child, depth + 1, row, places)
        rows.append(places[child][1])
    places[name] = depth, sum(rows) / len(rows) if rows else top
    return max(row, top + 1)


def svg() -> str:
    places, top = {}, 0
    for algo in algorithms().values():
        if not algo.parent:
            top = place(algo.name, 0, top, places) + 0.25
    at = {name: (2 + depth * ACROSS, 4 + row * DOWN) for name, (depth, row) in places.items()}
    width = max(x for x, _ in at.values()) + WIDTH + 2
    height = max(y for _, y in at.values()) + HEIGHT + 4
    parts = [edge(algo, at) for algo in algorithms().values() if algo.parent]
    parts += [node(name, *place) for name, place in at.items()]
    return (f'<div class="scroll"><svg class="ladder" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="group" aria-label="The ladder of files">'
            f'{"".join(parts)}</svg></div>')


def node(name: str, x: float, y: float) -> str:
    return (f'<a class="node" href="algos/{name}.html"><title>{ideas()[name][1]}</title>'
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
            f'<text x="{x + WIDTH / 2}" y="{y + 22}">{name}</text></a>')


def edge(algo, at: dict) -> str:
    (x, y), (to, end) = at[algo.parent], at[algo.name]
    x, y, end = x + WIDTH, y + HEIGHT / 2, end + HEIGHT / 2
    middle, label = (x + to) / 2, f"+{len(algo.new)}"
    told = (f"{algo.name}.py adds {len(algo.new)} lines to {algo.parent}.py, {algo.new_code} of "
            "them code: open the diff")
    return (f'<a class="edge" href="algos/{algo.parent}.html#next-{algo.name}">'
            f"<title>{told}</title><path d=\"M{x},{y} C{middle},{y} {middle},{end} {to},{end}\"/>"
            f'<rect x="{to - 46}" y="{end - 9}" width="38" height="18" rx="9"/>'
            f'<text x="{to - 27}" y="{end + 4}">{label}</text></a>')
