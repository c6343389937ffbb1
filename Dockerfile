# A slim image that serves the built-in model on a CPU:  docker build -t oneloop . && docker run -p 8000:8000 oneloop
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /src
ENV PIP_CONSTRAINT=/src/requirements/constraints.txt
RUN python -m venv /venv \
 && /venv/bin/pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu 'torch>=2.11,<2.14' \
 && /venv/bin/pip install --no-cache-dir /src

FROM python:3.12-slim
COPY --from=build /venv /venv
RUN useradd --create-home oneloop
USER oneloop
VOLUME /home/oneloop/.cache/oneloop
EXPOSE 8000
# The container's own interface, since loopback would not be reachable from outside it.
ENTRYPOINT ["/venv/bin/python", "-m", "server", "--host", "0.0.0.0"]
