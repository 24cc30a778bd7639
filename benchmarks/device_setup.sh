# Prepares a machine that has torch and no network: sourced from the repository root, with the folder CARRY (.carry)
# beside it: whl/ holds wheels of ultralytics and what it needs, polars.tar.xz an unpacked polars.
set -e
carry="${CARRY:-.carry}"
site=$(mktemp -d)
python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$carry"/whl/*.whl
tar xJf "$carry/polars.tar.xz" -C "$site"
mkdir -p "$site/detgraph"
for room in cfg models trainer patches; do ln -s "$PWD/$room" "$site/detgraph/$room"; done
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PATH="$site/bin:$PATH" PYTHONUNBUFFERED=1
export YOLO_OFFLINE=true YOLO_CONFIG_DIR="$(mktemp -d)" MPLBACKEND=Agg
