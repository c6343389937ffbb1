# oneloop in a container. For a CPU, with the built-in model:
#   docker build -t oneloop .
#   docker run --rm -p 8000:8000 -v oneloop-cache:/cache oneloop
# For an NVIDIA GPU (its torch is several GB larger):
#   docker build -t oneloop:gpu --build-arg DEVICE=gpu .
#   docker run --rm --gpus all -p 8000:8000 -v oneloop-cache:/cache oneloop:gpu serve Qwen/Qwen3-0.6B
# What stands behind the image's name is oneloop's command line: chat, doctor, bench, … Compose, Kubernetes: server/deploy/README.md
FROM python:3.12-slim AS build
ARG DEVICE=cpu
# Where torch comes from; empty: as DEVICE says.
ARG TORCH_INDEX=
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV PIP_CONSTRAINT=/src/requirements/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# torch first, in a layer that a change of ours does not make anew.
COPY requirements /src/requirements
RUN case "$DEVICE" in \
      cpu) index=https://download.pytorch.org/whl/cpu ;; \
      gpu) index=https://pypi.org/simple ;; \
      *) echo "DEVICE is cpu or gpu, not $DEVICE" >&2; exit 2 ;; \
    esac \
 && python -m venv /venv \
 && /venv/bin/pip install --index-url "${TORCH_INDEX:-$index}" 'torch>=2.11,<2.14'
COPY . /src
# With what reads pictures in chats, and forms of /v1/files. An image without the compiled kernels of the CPU is none.
RUN /venv/bin/pip install '/src[batches,media]' && /venv/bin/python -c 'import oneloop_native, oneloop_text'

FROM python:3.12-slim
ARG DEVICE=cpu
# Triton builds the launchers of its kernels with a C compiler, when it first meets a GPU.
RUN if [ "$DEVICE" = gpu ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
# The folder before the VOLUME, and whose it is: a volume made for a path that is not there belongs to root.
RUN useradd --uid 1000 --create-home oneloop && install -d -o oneloop -g oneloop /cache
COPY --from=build /venv /venv
# The container's own interface, since loopback would not be reachable from outside it.
ENV PATH=/venv/bin:$PATH ONELOOP_HOST=0.0.0.0 \
    XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface TRITON_CACHE_DIR=/cache/triton
# By its number, so that Kubernetes sees that it is not root.
USER 1000
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["oneloop"]
