# Prepares a machine that has torch and nothing of ours: sourced, from the repository root, with wheels beside it.
set -e
carry="${CARRY:-.carry}"
site=$(mktemp -d)
python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$carry"/whl/ultralytics*.whl
python3 -c "import lightning.pytorch" 2>/dev/null || python3 -m pip install -q --no-index --no-deps --target "$site" "$carry"/whl/lightning*.whl
python3 -c "import hypothesis" 2>/dev/null || python3 -m pip install -q --no-index --no-deps --target "$site" "$carry"/whl/hypothesis*.whl "$carry"/whl/sortedcontainers*.whl
tar xJf "$carry/polars.tar.xz" -C "$site"
mkdir -p "$site/detgraph"
for room in cfg models trainer patches; do ln -s "$PWD/$room" "$site/detgraph/$room"; done
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" YOLO_OFFLINE=true YOLO_CONFIG_DIR="$(mktemp -d)" MPLBACKEND=Agg PYTHONUNBUFFERED=1
