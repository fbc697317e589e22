#!/usr/bin/env bash
# images/build.sh [--tag TAG] [--registry PREFIX] [--variant cpu|cuda] [--base IMAGE] [--archive FOLDER] [NAME...]
# Builds the targets NAME (default: all) of images/Dockerfile with docker, or with buildah where there is no docker.
# --archive also writes FOLDER/NAME.tar, for nodes without a registry. BUILDER=docker|buildah selects the builder;
# BUILDAH_FLAGS are buildah's global flags (for example a storage driver). What an image consists of is written to
# build/sbom/NAME-TAG.cdx.json (CycloneDX, with the image's digest), and its licences are checked.
set -euo pipefail
cd "$(dirname "$0")/.."

tag="" registry="" variant=cpu base="" archive=""
while [ $# -gt 0 ] && [[ $1 == --* ]]; do
  case $1 in
    --tag) tag=$2 ;;
    --registry) registry=${2%/}/ ;;
    --variant) variant=$2 ;;
    --base) base=$2 ;;
    --archive) archive=$2 ;;
    *) sed -n '2,7p' "$0" >&2; exit 2 ;;
  esac
  shift 2
done
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(data trainer mlflow server)
[ -n "$tag" ] || tag=$(images/tag.sh)
builder=${BUILDER:-$(command -v docker >/dev/null && echo docker || echo buildah)}
read -ra flags <<<"${BUILDAH_FLAGS:-}"

arguments=(--build-arg "REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)" --build-arg "VARIANT=$variant"
  --build-arg "VERSION=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)" --file images/Dockerfile)
[ -z "$base" ] || arguments+=(--build-arg "BASE_IMAGE=$base")
[ -z "${TORCH_INDEX_URL:-}" ] || arguments+=(--build-arg "TORCH_INDEX_URL=$TORCH_INDEX_URL")
# This machine's pip settings as build secrets: they leave no trace in the image.
[ ! -r /etc/pip.conf ] || arguments+=(--secret "id=pip_site,src=/etc/pip.conf")
[ ! -r "$HOME/.config/pip/pip.conf" ] || arguments+=(--secret "id=pip_user,src=$HOME/.config/pip/pip.conf")
bill=/usr/local/share/recmill/sbom.cdx.json
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p build/sbom
if [ "$builder" = buildah ]; then
  # buildah's cache compares modification times, which differ between clones: build from a copy with fixed times.
  context=$scratch/context
  mkdir "$context"
  git ls-files --cached --others --exclude-standard -z -- .dockerignore CMakeLists.txt LICENSE README.md \
    pyproject.toml components images kernels pipelines recmill requirements |
    tar --create --null --files-from - --mode go=rX,u+w | tar --extract --directory "$context"
  find "$context" -exec touch --date @0 {} +
  # Folders of wheels and certificates named by those settings must exist inside the build, too.
  for path in $(python3 -m pip config list 2>/dev/null | grep -oE "/[^' ,]+" | sed -E "s,^/+,/,; s,/simple/?$,," | sort -u); do
    [ ! -e "$path" ] || arguments+=(--volume "$path:$path:ro")
  done
fi

for name in "${names[@]}"; do
  image="${registry}recmill/$name:$tag"
  echo "building $image with $builder" >&2
  if [ "$builder" = docker ]; then
    DOCKER_BUILDKIT=1 docker build "${arguments[@]}" --target "$name" --tag "$image" .
    [ -z "$archive" ] || docker save --output "$archive/$name.tar" "$image"
    digest=$(docker image inspect --format '{{.Id}}' "$image")
    docker run --rm --entrypoint cat "$image" "$bill" >"$scratch/bill"
  else
    buildah "${flags[@]}" bud --isolation chroot --layers --format docker "${arguments[@]}" \
      --target "$name" --tag "$image" "$context"
    [ -z "$archive" ] || { rm -f "$archive/$name.tar"; buildah "${flags[@]}" push "$image" "docker-archive:$archive/$name.tar:$image"; }
    digest=$(buildah "${flags[@]}" inspect --type image --format '{{.FromImageID}}' "$image")
    container=$(buildah "${flags[@]}" from --pull-never "$image")
    buildah "${flags[@]}" run --isolation chroot "$container" -- cat "$bill" >"$scratch/bill"
    buildah "${flags[@]}" rm "$container" >/dev/null
  fi
  python3 requirements/sbom.py --name "$image" --digest "$digest" --of "$scratch/bill" >"build/sbom/$name-$tag.cdx.json"
  python3 requirements/licences.py "build/sbom/$name-$tag.cdx.json" >&2
  echo "$image"
done
